"""Modules: trained parts of drafts.

A module is a safetensors file with a card: what it is, for which weights, and how it was trained. Only drafts use it, so a wrong one
costs speed and never tokens. This makes one, and a profile names it by path and hash:

    skipsearch train adapted --model demo --task pycode --out modules/

files, card      a file and what it says of itself, read without trusting it      weights     its tensors, put into a model that drafts
pupils, rows     what learns, by kind, and on which rows                          trainer     the training itself
text, thin       what it is trained on, and which sub-layers it keeps             kangaroo, s3d   the parts of these two papers
"""
