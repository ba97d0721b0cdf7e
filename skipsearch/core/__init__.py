"""Plain values that all packages use: masks, recipes, costs and counters. Nothing here loads torch
at import.

    mask                 which sub-layers a draft skips
    recipe               drafters with their settings; the tables DRAFTERS and EXITS
    cost_model           times of draft and verify passes, and of rounds
    stats                counters of decoding, trials, closed forms, confidence intervals
    schema_types         types of the fields of profiles, recipes and tasks
    strict_yaml          the reader of all YAML files
    registry             looks a class up by its name in a table
    machine              the hardware and software of this machine
    files                folders of this user, atomic writes, checks of paths
"""
