"""Models without a row in the table of families: their own forward is observed, then run by
layer.
"""
