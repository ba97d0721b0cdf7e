"""Kangaroo: draft from the hidden state of an early layer."""
