#define _GNU_SOURCE // for the masks of place.h
// Builds all kernels as one unit, which exports pd_init, pd_norm, pd_gate, pd_attend (float32 throughout), pd_copy,
// pd_product, pd_layers, pd_experts, pd_floats (with AVX-512), pd_lora, pd_place, pd_states. For a pool of another dtype
// only pd_attend and its parts are built, and with LATENTS only pd_latents and pd_choose, for whichever pool.
#if defined(LATENTS)
#include "index.h"
#include "latent.h"
#else
#include "attention.h"
#if POOL == POOL_FLOAT32
#include "copy.h"
#include "experts.h"
#include "floats.h"
#include "layers.h"
#include "lora.h"
#include "place.h"
#include "product.h"
#include "rows.h"
#include "states.h"
#endif
#endif
