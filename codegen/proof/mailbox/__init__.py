"""Mailbox protocols of a plan, explored over ranks, parities and skew."""
