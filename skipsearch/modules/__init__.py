"""Trained parts of drafts: their files, what they say of themselves, how they are trained, and the model that drafts with them."""
