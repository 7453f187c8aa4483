"""The seam to serving engines: from their decode metadata to the records that a layer takes."""
