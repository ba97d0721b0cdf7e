"""Search the fastest recipe for a model and a task, measure it, and write a profile.

driver             `tune`: six steps from settings to profile
settings           the settings of a search, checked
calibration        calibration text, latency table and trained drafts, before the first mask
search_loop        propose a mask, judge it, report it
objective          predict a recipe's decode time; wall_objective measures it
readings           what drafts read: bits and vocabularies
trained_candidates recipes of trained drafts; draft_timing times their steps
online_candidates  settings of drafters that choose masks during decoding
race               candidates decode in turn, and the fastest wins
study, storage     trials that several processes share
profile_builder    from measurement to profile
verification       measure again what a profile claims
events             events that a search reports while it runs
"""
