"""Draft with a second, smaller model."""
