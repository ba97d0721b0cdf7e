"""Search the fastest recipe for a model and a task, measure it, and write a profile.

driver             `tune`: six steps from settings to profile
settings           what a search is asked for, checked
calibration        what is known before the first mask
search_loop        propose a mask, judge it, report it
objective          predict a recipe's decode time; wall_objective measures it
online_candidates  settings of drafters that choose masks while they decode
race               which candidates decode in turn, and who wins
study, storage     trials that several processes share
profile_builder    from measurement to profile
verification       measure a profile's claim again
events             what is reported while a search runs
"""
