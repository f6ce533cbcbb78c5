"""Problems of BLAS routines."""
