"""Constraints on answers: which tokens may follow, and which must.

`matcher.py` has the port; `llguidance_matcher.py` implements it with the library llguidance, and
`after_thinking.py` lets a constraint begin after the thinking.
"""

from skipsearch.constraints.matcher import CompiledConstraint, Matcher, compile_constraint

__all__ = ["CompiledConstraint", "Matcher", "compile_constraint"]
