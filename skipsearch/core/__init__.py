"""Plain values that everything speaks in: masks, recipes, costs and counters. Nothing here loads
torch.

mask            which sub-layers a draft skips            recipe         drafters with their
settings, and their registry cost_model      what draft and verify passes cost         stats
counters of decoding, closed forms, intervals schema_types    types of fields in files
strict_yaml    the one YAML reader registry        look up a class by its registered name    machine
what this machine and its software are files           atomic writes, private folders"""
