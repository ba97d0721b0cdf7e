"""S3D: draft several tokens in one pass of the model without its middle layers."""
