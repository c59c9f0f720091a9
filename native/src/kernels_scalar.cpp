#define HOSTWARD_KERNELS kScalarKernels
#include "kernels.inc"
