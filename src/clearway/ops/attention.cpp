// softmax(scale * q k^T) v on a CPU with AVX2 or AVX-512, float32. Compiled on the user's machine by _cpp.py; the host
// side is attention_native.py.
//
// Lanes are queries: a vector holds one score of LANES queries, and a tile of WIDE vectors sees the keys one
// block after another, whose scores stay in the first-level cache. So sums and maxima over keys need no
// shuffles, and both products load a number of k or v once for a whole tile. An exponential is a power of two:
// log2(e) is in q's scale.
//
// Sources: Milakov and Gimelshein 2018 (arXiv 1805.02867) for the softmax that goes on, over blocks of queries
// and keys as Dao et al. 2022 (arXiv 2205.14135); Goto and van de Geijn 2008, "Anatomy of High-Performance
// Matrix Multiplication", for products in registers.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

namespace {

enum {
#ifdef __AVX512F__
    LANES = 16,
    ROWS = 8,              // of 3 vectors: 24 sums, and 8 registers are left
#define REGISTER "v"
#else
    LANES = 8,
    ROWS = 4,              // of 3 vectors: 12 sums, and 4 registers are left
#define REGISTER "x"
#endif
    WIDE = 3,              // vectors of queries in a tile
    TILE = WIDE * LANES,
    KEYS = 128,            // in a block
    TILES = 8,             // that read one block while it is in the cache
    CHUNK = TILES * TILE,  // queries of one piece of work
};

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

struct Strides {  // of batch, heads and tokens, in elements; a head's numbers lie side by side
    int64_t batch, head, token;
};

struct Work {
    const float *q, *k, *v;
    float *out;
    int64_t batch, heads, queries, keys, size, value_size;
    Strides q_at, k_at, v_at, out_at;
    float scale;
    int64_t next, failed;  // the piece of work that nobody has begun; whether anybody had no memory
};

INLINE int64_t lower(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t above(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }
INLINE Vec splat(float x) { return x - (Vec){0}; }
INLINE Vec *at(float *x) { return (Vec *)x; }
INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b where either is NaN

// 2^x for x <= 0, NaN for NaN; 0 below -126. The polynomial's relative error is at most 9.2e-8: minimax on
// [-1/2, 1/2], fitted for this file.
INLINE Vec power_of_two(Vec x) {
    Ints none = x < splat(-126.0f);
    x = larger(splat(-126.0f), x);
    const float round = 12583039.0f;  // 1.5 * 2^23 + 127: the sum's lowest bits are the exponent of 2^[x]
    Vec whole = x + round;
    Vec f = x - (whole - round);
    Vec p = f * 1.326472712e-3f + 9.671512645e-3f;
    p = p * f + 5.550733743e-2f;
    p = p * f + 2.402224209e-1f;
    p = p * f + 6.931469776e-1f;
    p = p * f + 1.0f;
    return (Vec)((Ints)(p * (Vec)((Ints)whole << 23)) & ~none);
}

// out[r] += sum over i of a[i * a_next + r * a_row] * b[i], for ROWS rows r; out and b are lines of a tile.
// `most` becomes the largest of out and itself.
template <int wide, bool adds, bool bounds>
INLINE void product(
    int64_t count, const float *a, int64_t a_next, int64_t a_row, float *b, float *out, Vec *most) {
    Vec sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) sums[r][w] = adds ? at(out + r * TILE)[w] : splat(0.0f);
    for (int64_t i = 0; i < count; i++) {
        Vec line[WIDE];
        for (int w = 0; w < wide; w++) {
            line[w] = at(b + i * TILE)[w];
            __asm__("" : "+" REGISTER(line[w]));  // GCC would load it again for every row
        }
        for (int r = 0; r < ROWS; r++) {
            Vec x = splat(a[i * a_next + r * a_row]);
            for (int w = 0; w < wide; w++) sums[r][w] += x * line[w];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) {
            at(out + r * TILE)[w] = sums[r][w];
            if (bounds) most[w] = larger(sums[r][w], most[w]);
        }
}

struct Block {  // of keys: k as (keys, size), v as (keys, value_size), room for scores as (keys, TILE)
    int64_t keys, size, value_size;
    float *k, *v, *scores;
};

struct Tile {  // of queries: q as (size, TILE), sums as (value_size, TILE), the largest score and the total
    float *q, *sums, *most, *total;
};

template <int wide>
__attribute__((noinline)) void read(const Block *block, const Tile *tile) {
    float *scores = block->scores;
    const int64_t keys = block->keys, whole = keys / ROWS * ROWS;
    Vec most[WIDE], total[WIDE];
    for (int w = 0; w < wide; w++) most[w] = at(tile->most)[w];
    for (int64_t j = 0; j < whole; j += ROWS)
        product<wide, false, true>(
            block->size, block->k + j * block->size, 1, block->size, tile->q, scores + j * TILE, most);
    if (whole < keys) {  // rows beyond the keys are of zeros, and their scores are not looked at
        product<wide, false, false>(
            block->size, block->k + whole * block->size, 1, block->size, tile->q, scores + whole * TILE,
            most);
        for (int64_t j = whole; j < keys; j++)
            for (int w = 0; w < wide; w++) most[w] = larger(at(scores + j * TILE)[w], most[w]);
    }
    Vec base[WIDE];  // what is subtracted: scores that are all -inf stay so
    for (int w = 0; w < wide; w++) {
        base[w] = most[w] == splat(-INFINITY) ? splat(0.0f) : most[w];
        Vec less = power_of_two(at(tile->most)[w] - base[w]);
        at(tile->most)[w] = most[w];
        total[w] = at(tile->total)[w] * less;
        for (int64_t e = 0; e < block->value_size; e++) at(tile->sums + e * TILE)[w] *= less;
    }
    for (int64_t j = 0; j < keys; j++)
        for (int w = 0; w < wide; w++) {
            Vec p = power_of_two(at(scores + j * TILE)[w] - base[w]);
            at(scores + j * TILE)[w] = p;
            total[w] += p;
        }
    for (int w = 0; w < wide; w++) at(tile->total)[w] = total[w];
    for (int64_t e = 0; e < block->value_size; e += ROWS)
        product<wide, true, false>(
            keys, block->v + e, block->value_size, 1, scores, tile->sums + e * TILE, most);
}

// Copies `rows` rows of `width`, with zeros up to `wide` numbers a row and up to `high` rows.
INLINE void gather(
    const float *from, int64_t step, int64_t rows, int64_t width, float *to, int64_t wide, int64_t high) {
    for (int64_t i = 0; i < rows; i++) {
        memcpy(to + i * wide, from + i * step, 4 * width);
        for (int64_t e = width; e < wide; e++) to[i * wide + e] = 0.0f;
    }
    memset(to + rows * wide, 0, 4 * wide * (high - rows));
}

INLINE const float *place(const float *x, const Strides &by, int64_t batch, int64_t head, int64_t token) {
    return x + batch * by.batch + head * by.head + token * by.token;
}

// One piece: up to CHUNK queries of one head, in `room`.
void piece(const Work *work, int64_t batch, int64_t head, int64_t first, float *room) {
    const int64_t size = work->size, value_size = above(work->value_size, ROWS);
    const int64_t many = lower(work->queries - first, CHUNK), tiles = (many + TILE - 1) / TILE;
    Block block = {0, size, value_size, room, 0, 0};
    block.v = block.k + KEYS * size;
    block.scores = block.v + KEYS * value_size;
    const int64_t length = (size + value_size + 2) * TILE;
    Tile tile[TILES];
    const float *q = place(work->q, work->q_at, batch, head, first);
    for (int64_t i = 0; i < tiles; i++) {
        float *mine = block.scores + KEYS * TILE + i * length;
        tile[i].q = mine;
        tile[i].sums = mine + size * TILE;
        tile[i].most = tile[i].sums + value_size * TILE;
        tile[i].total = tile[i].most + TILE;
        memset(tile[i].sums, 0, 4 * (value_size + 2) * TILE);
        for (int64_t x = 0; x < TILE; x++) {
            const int64_t row = i * TILE + x;
            for (int64_t e = 0; e < size; e++)
                tile[i].q[e * TILE + x] = row < many ? q[row * work->q_at.token + e] * work->scale : 0.0f;
            tile[i].most[x] = -INFINITY;
        }
    }
    for (int64_t j = 0; j < work->keys; j += KEYS) {
        block.keys = lower(work->keys - j, KEYS);
        const int64_t high = above(block.keys, ROWS);
        const float *k = place(work->k, work->k_at, batch, head, j);
        const float *v = place(work->v, work->v_at, batch, head, j);
        gather(k, work->k_at.token, block.keys, size, block.k, size, high);
        gather(v, work->v_at.token, block.keys, work->value_size, block.v, value_size, block.keys);
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t vectors = (many - i * TILE + LANES - 1) / LANES;
            (vectors >= 3 ? read<3> : vectors == 2 ? read<2> : read<1>)(&block, &tile[i]);
        }
    }
    const Strides &by = work->out_at;
    float *out = work->out + batch * by.batch + head * by.head + first * by.token;
    for (int64_t row = 0; row < many; row++) {
        const Tile &mine = tile[row / TILE];
        const int64_t x = row % TILE;
        for (int64_t e = 0; e < work->value_size; e++)
            out[row * by.token + e] = mine.sums[e * TILE + x] / mine.total[x];
    }
}

// What each thread does: one piece after another that nobody has begun.
void pieces(void *given) {
    Work *work = (Work *)given;
    const int64_t chunks = (work->queries + CHUNK - 1) / CHUNK;
    const int64_t all = work->batch * work->heads * chunks;
    const int64_t width = work->size + above(work->value_size, ROWS);
    const int64_t room_bytes = 4 * (KEYS * (width + TILE) + TILES * TILE * (width + 2));
    float *room = (float *)aligned_alloc(64, above(room_bytes, 64));
    if (!room) {
        __atomic_store_n(&work->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (;;) {
        const int64_t number = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED);
        if (number >= all) break;
        const int64_t row = number / chunks;
        piece(work, row / work->heads, row % work->heads, number % chunks * CHUNK, room);
    }
    free(room);
}

}  // namespace

// 0, or 1 where there was no memory. `given`: addresses of q, k, v and out; batch, heads, queries, keys, sizes
// of q and v; three strides of each of the four. `scale` has log2(e) in it. `parallel` is OpenMP's
// GOMP_parallel, which calls a function in `threads` threads.
extern "C" int attention(
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned), int threads, const int64_t *given,
    float scale) {
    Work work;
    work.q = (const float *)given[0];
    work.k = (const float *)given[1];
    work.v = (const float *)given[2];
    work.out = (float *)given[3];
    work.batch = given[4], work.heads = given[5], work.queries = given[6], work.keys = given[7];
    work.size = given[8], work.value_size = given[9];
    work.q_at = {given[10], given[11], given[12]};
    work.k_at = {given[13], given[14], given[15]};
    work.v_at = {given[16], given[17], given[18]};
    work.out_at = {given[19], given[20], given[21]};
    work.scale = scale;
    work.next = work.failed = 0;
    if (parallel && threads > 1)
        parallel(pieces, &work, (unsigned)threads, 0);
    else
        pieces(&work);
    return (int)work.failed;
}
