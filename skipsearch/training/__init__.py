"""Train a draft for a model: from text to a module file.

driver           the steps of a training
corpus           text, including text that the model writes
head_text        requests and answers for a draft head
feature_file     texts of a draft head with the full model's hidden states, on disk
mask_selection   which sub-layers a trained draft keeps
students         the trainable weights and draft passes of each kind of draft
distill_batch    the full model's targets, and the draft steps of a text
trainer          the training loop and its checkpoints"""
