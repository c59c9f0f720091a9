#define HOSTWARD_KERNELS kAvx512Kernels
#include "kernels.inc"
