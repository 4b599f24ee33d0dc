// Paged attention over the block-major pool, and the operations just before it: norms of q and k, rotation, KV write.
// It has two forms. Decode (one query) takes several KV heads of a sequence at a time, and several sequences if their
// block tables begin with the same blocks; its vectors contain consecutive numbers of a head. Otherwise one KV head is
// computed at a time, and queries are the lanes of vectors: a tile of up to 2 * VL rows (token, head) is transposed
// once, keys and values are broadcast from the pool, and the softmax needs no sum across a vector. Both forms keep a
// running maximum m and sum l per row.
// A row's result does not depend on the rest of the batch.
#pragma once
#include "attention_decode.h"
#include "attention_prefill.h"

// ---- the work of one call

static int is_decode(const Layer *y, int64_t query_len) {
    return query_len == 1 && y->num_heads <= MAX_GROUP * y->num_kv_heads;
}

// Returns how many sequences, from position `at` of the step's order on, are computed together. If their windows
// exclude the first keys, they begin at different keys, and each is computed alone.
static int64_t num_together(const Step *s, const Layer *y, int64_t at) {
    int64_t rows = s->together ? MAX(1, s->together[at]) : 1;
    int sees_all = !y->window || s->context_lens[s->order[at + rows - 1]] <= y->window;
    return sees_all && is_decode(y, 1) ? rows : 1;
}

// Returns the number of items for the KV heads of `rows` sequences that decode together. It is the same as for separate
// sequences, if there are enough heads.
static int64_t head_parts(const Work *w, int64_t rows) {
    const Layer *y = w->layer;
    int64_t nbytes = 8 * rows * y->num_heads * y->head_dim; // bytes of queries and sums
    int64_t parts = w->step->num_threads > 1 ? w->decode_parts * rows : 1;
    if (rows > 1) parts = MAX(parts, (nbytes + TOGETHER_NBYTES - 1) / TOGETHER_NBYTES);
    return MIN(parts, y->num_kv_heads);
}

static int64_t row_parts(const Work *w, int64_t rows) {
    int64_t group = w->layer->num_heads / w->layer->num_kv_heads;
    int64_t most = MIN(MOST_ROWS_TOGETHER, MOST_HEADS_TOGETHER / group);
    return MAX(MIN(rows, w->row_parts), (rows + most - 1) / most);
}

static int64_t num_items(const Work *w, int64_t query_len, int64_t rows) {
    const Layer *y = w->layer;
    int64_t group = y->num_heads / y->num_kv_heads;
    if (is_decode(y, query_len)) return head_parts(w, rows) * row_parts(w, rows);
    return (query_len * group + LANES - 1) / LANES * y->num_kv_heads;
}

// Finds item number `index`; `at` is an earlier item's position in the step's order. Returns 0 past the last item.
static int find_item(const Work *w, int64_t index, int64_t *at, Item *item) {
    const Step *s = w->step;
    const Layer *y = w->layer;
    if (index >= w->item_starts[s->num_seqs]) return 0;
    while (index >= w->item_starts[*at + 1]) ++*at;
    const int32_t *seqs = s->order + *at;
    int64_t inner = index - w->item_starts[*at], kv_head, stop, tile = 0, first = 0;
    int64_t dim = y->head_dim, group = y->num_heads / y->num_kv_heads, start = s->query_starts[*seqs];
    item->query_len = s->query_starts[*seqs + 1] - start;
    item->num_rows = 1;
    if (is_decode(y, item->query_len)) {
        int64_t rows = num_together(s, y, *at), parts = head_parts(w, rows), cuts = row_parts(w, rows);
        kv_head = y->num_kv_heads * (inner / cuts) / parts;
        stop = y->num_kv_heads * (inner / cuts + 1) / parts;
        first = rows * (inner % cuts) / cuts;
        item->num_rows = rows * (inner % cuts + 1) / cuts - first;
    } else {
        int64_t tiles = (w->item_starts[*at + 1] - w->item_starts[*at]) / y->num_kv_heads;
        kv_head = inner / tiles, stop = kv_head + 1;
        tile = tiles - 1 - inner % tiles; // longest first
    }
    const char *head = w->pool + kv_head * vector_nbytes(dim);
    item->source = (Source){head + y->key_offset, head + y->value_offset,
                            s->block_table + s->table_starts[seqs[first + item->num_rows - 1]], y->block_stride,
                            y->num_kv_heads * vector_nbytes(dim), y->block_size};
    item->q = w->qkv + kv_head * group * dim;
    item->out = w->out + kv_head * group * dim;
    item->sinks = y->sinks ? y->sinks + kv_head * group : 0;
    item->key_limits = s->key_limits ? s->key_limits + start : 0;
    item->num_heads = stop - kv_head;
    for (int64_t r = 0; r < item->num_rows; r++) {
        item->tokens[r] = s->query_starts[seqs[first + r]];
        item->context_lens[r] = s->context_lens[seqs[first + r]];
    }
    item->first_row = tile * LANES;
    return 1;
}

// Computes with all threads of a team.
void pd_attend_work(void *data) {
    Work *w = data;
    const Step *s = w->step;
    Item items[2], *item = items, *after = items + 1;
    int64_t at = 0;
    for (int64_t token; (token = next_items(&w->token_counter, 4)) < s->num_tokens;)
        for (int64_t t = token; t < MIN(token + 4, s->num_tokens); t++) prepare_token(w, t);
    if (s->num_threads > 1) runtime.barrier(); // all keys are written
    int more = find_item(w, next_items(&w->item_counter, 1), &at, item);
    while (more) {
        int decodes = is_decode(w->layer, item->query_len);
        if (!decodes) attend_tile(w->layer, item);
        more = find_item(w, next_items(&w->item_counter, 1), &at, after);
        if (decodes) decode(w->layer, item, more && is_decode(w->layer, after->query_len) ? after : 0);
        Item *done = item;
        item = after, after = done;
    }
}

// Sets starts [num_seqs + 1]; returns the number of items.
static int64_t count_items(const Work *w, int64_t *starts) {
    const Step *s = w->step;
    starts[0] = 0;
    for (int64_t i = 0, rows; i < s->num_seqs; i += rows) {
        int64_t seq = s->order[i], query_len = s->query_starts[seq + 1] - s->query_starts[seq];
        rows = num_together(s, w->layer, i);
        starts[i + 1] = starts[i] + num_items(w, query_len, rows);
        for (int64_t r = 1; r < rows; r++) starts[i + r + 1] = starts[i + 1];
    }
    return starts[s->num_seqs];
}

// Plans the work of pd_attend for a team; starts [num_seqs + 1].
void pd_attend_plan(const Step *step, const Layer *layer, char *pool, float *qkv, float *out, int64_t *starts,
                    Work *work) {
    int64_t wanted = (4 * step->num_threads + step->num_seqs - 1) / step->num_seqs;
    int64_t parts = step->num_threads > 1 ? MIN(wanted, layer->num_kv_heads) : 1;
    *work = (Work){step, layer, pool, qkv, out, 0, 0, starts, parts, 1};
    int64_t total = count_items(work, starts), least = 2 * step->num_threads;
    while (step->together && total * work->row_parts < least && total * work->row_parts % step->num_threads)
        work->row_parts++;
    if (work->row_parts > 1) count_items(work, starts);
}

// qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]; its queries are rotated in place.
// out [num_tokens, num_heads * head_dim]. The caller has checked every block, slot and shape.
void pd_attend(const Step *step, const Layer *layer, char *pool, float *qkv, float *out) {
    Work work;
    pd_attend_plan(step, layer, pool, qkv, out, alloca((size_t)(step->num_seqs + 1) * sizeof(int64_t)), &work);
    run(pd_attend_work, &work, step->num_threads);
}
