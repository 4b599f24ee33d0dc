// Builds all kernels as one unit, which exports pd_init, pd_norm, pd_gate, pd_attend (float32 throughout),
// pd_copy, pd_product.
#include "attention.h"
#include "copy.h"
#include "product.h"
#include "rows.h"
