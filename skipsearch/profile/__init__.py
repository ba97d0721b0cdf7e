"""Profiles: the recipe of a search, its model, machine and measurements. Imports no torch."""

from skipsearch.core.schema_types import Interval, round_significant
from skipsearch.profile.canonical import dump_profile
from skipsearch.profile.load import load_profile, parse_profile
from skipsearch.profile.save import save_profile
from skipsearch.profile.schema import Profile

__all__ = [
    "Interval",
    "Profile",
    "dump_profile",
    "load_profile",
    "parse_profile",
    "round_significant",
    "save_profile",
]
