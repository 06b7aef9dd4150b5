// For any processor the compiler targets, and float64, which is for tests.
#define MVH_ISA generic
#include "scan.h"

namespace mvh::generic {
MVH_DEFINE_KERNELS(float)
MVH_DEFINE_KERNELS(double)
}  // namespace mvh::generic
