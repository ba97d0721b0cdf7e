"""The embedded model (`demo`) with its profiles.

tools/demo_model has the scripts that trained it.
"""
