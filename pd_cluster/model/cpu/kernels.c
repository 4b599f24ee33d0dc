// All kernels as one unit. Exported: pd_init, pd_norm, pd_gate, pd_attend. float32 throughout.
#include "attention.h"
#include "rows.h"
