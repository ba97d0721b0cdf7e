"""The embedded model: the scripts that collect its text, train it and describe it. Nothing else
imports this room.
"""
