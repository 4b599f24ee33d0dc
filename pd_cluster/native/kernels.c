#define _GNU_SOURCE // for the core masks of thread_binding.h
// Builds all kernels as one unit, which exports pd_init, pd_norm, pd_gate, pd_attend (float32 throughout), pd_copy,
// pd_product, pd_layers, pd_experts, pd_floats (with AVX-512), pd_lora, pd_place, pd_states. For a pool of another
// dtype, only pd_attend and its parts are built. With LATENTS, only pd_latents and pd_choose are built, for a pool of
// any dtype.
#if defined(LATENTS)
#include "sparse_index.h"
#include "latent_attention.h"
#else
#include "paged_attention.h"
#if POOL == POOL_FLOAT32
#include "streaming_copy.h"
#include "expert_products.h"
#include "float_products.h"
#include "decoder_layers.h"
#include "lora_products.h"
#include "thread_binding.h"
#include "packed_products.h"
#include "row_kernels.h"
#include "recurrent_layers.h"
#endif
#endif
