#define HOSTWARD_KERNELS kNeonKernels
#include "kernels.inc"
