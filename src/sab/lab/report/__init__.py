"""Pictures of run folders; needs the extra `report`."""
