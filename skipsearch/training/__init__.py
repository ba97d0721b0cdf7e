"""Train a draft for a model: from text to a module file.

driver           the steps of a training
corpus           text, including text that the model writes
mask_selection   which sub-layers a trained draft keeps
students         what is trained, by kind
distill_batch    what the full model teaches, and the rows of a draft
trainer          the training loop and its checkpoints
distributed      several processes, one for each GPU"""
