"""Profiles: what a search found, for which model and machine, and how far to trust it. Imports no torch.

    schema            version 2, as frozen models               yaml, load    a strict reader
    dump              canonical text, atomic saving             migrate       older versions
    match             does it fit this model and machine?       places        where profiles are kept
    lookup            `--profile auto`: the ladder              git, gitcli   pull a repository of profiles
    importers         others' skip sets                         validate      a whole repository
    describe, draw    a profile and its mask in the terminal    compare       two profiles side by side
"""

from skipsearch.fields import Interval, round_sig
from skipsearch.profile.dump import dump_profile, save_profile
from skipsearch.profile.load import load_profile, parse_profile
from skipsearch.profile.schema import Profile

__all__ = ["Interval", "Profile", "dump_profile", "load_profile", "parse_profile", "round_sig", "save_profile"]
