"""Parts that all kernels share: arrays, arguments, dispatch, compilers and launches."""
