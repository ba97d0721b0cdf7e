"""S3D: several tokens from one pass over a middle-skipped model."""
