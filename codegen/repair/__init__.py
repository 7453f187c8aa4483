"""Repairs of findings: edits of the spec, each tried out before it is offered, ranked by cost."""
