#define HOSTWARD_KERNELS kAvx2Kernels
#include "kernels.inc"
