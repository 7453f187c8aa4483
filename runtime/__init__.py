"""What generated layers may import: cache layouts, sharding, mailboxes, reference operations."""
