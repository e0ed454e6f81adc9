"""The Triton kernels, one op a file; each launcher stands below its kernel. `tile` holds what they share."""
