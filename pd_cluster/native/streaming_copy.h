// Copies memory past the cache: destination lines are not read first, and do not evict other data.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
typedef __m512i pd_line;
#define PD_LOAD(from) _mm512_loadu_si512(from)
#define PD_STREAM(to, line) _mm512_stream_si512((void *)(to), line)
#elif defined(__AVX2__)
typedef __m256i pd_line;
#define PD_LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define PD_STREAM(to, line) _mm256_stream_si256((__m256i *)(to), line)
#endif

// The two ranges must not overlap.
void pd_copy(uint8_t *restrict to, const uint8_t *restrict from, int64_t nbytes) {
#if defined(PD_STREAM)
    const int64_t width = sizeof(pd_line);
    int64_t head = -(intptr_t)to & (width - 1);
    if (head > nbytes) head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    int64_t at = 0;
    for (; at + 4 * width <= nbytes; at += 4 * width) {
        pd_line a = PD_LOAD(from + at), b = PD_LOAD(from + at + width);
        pd_line c = PD_LOAD(from + at + 2 * width), d = PD_LOAD(from + at + 3 * width);
        PD_STREAM(to + at, a);
        PD_STREAM(to + at + width, b);
        PD_STREAM(to + at + 2 * width, c);
        PD_STREAM(to + at + 3 * width, d);
    }
    _mm_sfence(); // makes the bytes visible before any thread learns that they are there
    memcpy(to + at, from + at, nbytes - at);
#else
    memcpy(to, from, nbytes);
#endif
}
