"""Export a profile's skip drafter as a checkpoint, for engines that draft with a second model."""

from skipsearch.export.export_profile import export_draft

__all__ = ["export_draft"]
