"""Cost model: estimated times of kernels, from the problem and the device."""
