"""What a reviewer looks at: pictures of a schedule, and what an edit of it changes."""
