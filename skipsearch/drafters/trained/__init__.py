"""Modules: trained parts of drafts.

A module is a safetensors file with a card: what it is, for which weights, and how it was trained.
Only drafts use it, so a bad one costs speed and never changes tokens. This makes one, and a profile
names it by path and hash:

    skipsearch train adapted --model demo --task pycode --out modules/

card             what a module says about itself
module_files     finding a file and reading its header, without trusting it
module_weights   its tensors, put into a model that drafts"""
