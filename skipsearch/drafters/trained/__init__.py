"""Modules: files with the trained weights of drafters.

A module is a safetensors file with a card: its kind, its model, and its training. Only drafts use
it, so a bad module costs speed but does not change tokens. A profile names a module by path and
hash. This command trains one:

    skipsearch train adapted --model demo --task pycode --out modules/

card             what a module says about itself
module_files     finding a file and reading its header, without trusting it
module_weights   its tensors, put into a model that drafts
"""
