"""Spec to plan: pure functions from a validated specification to frozen launch lists."""
