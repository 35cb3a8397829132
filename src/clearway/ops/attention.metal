// out = softmax(scale * q k^T) v, without the matrix of scores: online softmax over tiles of keys.
//
// Arguments, in order:
//   0 q, 1 k, 2 v    (B, N, L, E) by strides: any layout, broadcast heads and batches too
//   3 out            (B, N, Lq, E) by strides
//   4 shape          int64: query tokens, key tokens, strides of q, k, v and out (B, N, L, E each),
//                    vectors (1: rows of k and v can be read four elements at a time)
//   5 scale          float32
// Launch: threads [ceil(Lq / 32) * 128, N, B], group_size [128, 1, 1].
// Names: attention_<type>_<E>, type half, bfloat or float, E 40, 64, 80, 96, 128 or 160.
//
// A threadgroup takes 32 queries, each of its 4 simdgroups 8 of them. K and V tiles follow each other through
// one buffer in threadgroup memory. Scores stay in 8x8 fragments, of which lane l holds, with q = l / 4,
// row (q & 4) + (l / 2) % 4 and column (q & 2) * 2 + (l % 2) * 2 and the one after: the four lanes of a row
// differ in bits 0 and 3. Apple does not document that layout; MLX and PyTorch rely on it, as this does.
// Sums and the accumulator are fp32; the weights of v have the input's type. Powers of two instead of e: one
// multiplication by log2(e) goes into the scale.
// Sources: Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 (tiles); tile sizes as in MLX's.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;

struct AttentionShape {
  long queries, keys;
  long q[4], k[4], v[4], out[4];
  long vectors;
};

constant constexpr int QUERIES = 32;   // of a threadgroup
constant constexpr int THREADS = 128;  // of a threadgroup
constant constexpr int PADDING = 8;    // elements after a tile's row: rows begin in different banks

// Up to KEYS rows of a (rows, E) matrix; rows past its end become zeros.
template <typename T, int E, int KEYS>
inline void load_tile(threadgroup T* tile, device const T* from, uint rows, uint row_stride, uint stride,
                      bool vectors, uint tid) {
  if (vectors) {
    for (uint i = tid; i < uint(KEYS * E / 4); i += THREADS) {
      const uint r = i / (E / 4), c = i % (E / 4) * 4;
      vec<T, 4> value = vec<T, 4>(T(0.0f));
      if (r < rows) value = *(device const vec<T, 4>*)(from + r * row_stride + c);
      *(threadgroup vec<T, 4>*)(tile + r * (E + PADDING) + c) = value;
    }
  } else {
    for (uint i = tid; i < uint(KEYS * E); i += THREADS) {
      const uint r = i / E, c = i % E;
      tile[r * (E + PADDING) + c] = r < rows ? from[r * row_stride + c * stride] : T(0.0f);
    }
  }
}

template <typename T, int E, int KEYS>
kernel void attention(device const T* q [[buffer(0)]], device const T* k [[buffer(1)]],
                      device const T* v [[buffer(2)]], device T* out [[buffer(3)]],
                      constant AttentionShape& shape [[buffer(4)]], constant float& scale [[buffer(5)]],
                      uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]],
                      uint simd_index [[simdgroup_index_in_threadgroup]]) {
  constexpr int ACROSS = E / 8, DOWN = KEYS / 8, WIDTH = E + PADDING;
  threadgroup T tile[KEYS * WIDTH];

  const uint quad = lane / 4;
  const uint row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
  const ulong query = ulong(group.x) * QUERIES + simd_index * 8 + row;
  const bool exists = query < ulong(shape.queries);
  const long b = group.z, n = group.y;
  k += b * shape.k[0] + n * shape.k[1];
  v += b * shape.v[0] + n * shape.v[1];
  const bool vectors = shape.vectors != 0;

  simdgroup_matrix<T, 8, 8> queries[ACROSS];
  device const T* mine = q + b * shape.q[0] + n * shape.q[1] + (exists ? long(query) : 0L) * shape.q[2];
#pragma unroll
  for (int d = 0; d < ACROSS; d++) {
    const uint at = d * 8 + column, step = uint(shape.q[3]);
    queries[d].thread_elements()[0] = exists ? mine[at * step] : T(0.0f);
    queries[d].thread_elements()[1] = exists ? mine[(at + 1) * step] : T(0.0f);
  }
  simdgroup_matrix<float, 8, 8> sums[ACROSS];
#pragma unroll
  for (int d = 0; d < ACROSS; d++) sums[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  const float factor = scale * M_LOG2E_F;
  float highest = -INFINITY, total = 0.0f;

  for (long first = 0; first < shape.keys; first += KEYS) {
    const uint rows = shape.keys - first < KEYS ? uint(shape.keys - first) : uint(KEYS);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the tile may still be read as V
    load_tile<T, E, KEYS>(tile, k, rows, uint(shape.k[2]), uint(shape.k[3]), vectors, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_matrix<float, 8, 8> scores[DOWN];
#pragma unroll
    for (int j = 0; j < DOWN; j++) {
      scores[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
#pragma unroll
      for (int d = 0; d < ACROSS; d++) {
        simdgroup_matrix<T, 8, 8> keys;
        simdgroup_load(keys, tile + j * 8 * WIDTH + d * 8, WIDTH, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(scores[j], queries[d], keys, scores[j]);
      }
    }

    float now = highest;
#pragma unroll
    for (int j = 0; j < DOWN; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool key_exists = j * 8 + column + e < rows;
        const float score = key_exists ? scores[j].thread_elements()[e] * factor : -INFINITY;
        scores[j].thread_elements()[e] = score;
        now = max(now, score);
      }
    now = max(now, simd_shuffle_xor(now, ushort(1)));
    now = max(now, simd_shuffle_xor(now, ushort(8)));
    // Where every score so far is -inf the difference would be NaN; a later tile may still have a number.
    const float base = now == -INFINITY ? 0.0f : now;
    const float rescale = exp2(highest - base);
    float added = 0.0f;
    simdgroup_matrix<T, 8, 8> weights[DOWN];
#pragma unroll
    for (int j = 0; j < DOWN; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float weight = exp2(scores[j].thread_elements()[e] - base);
        added += weight;
        weights[j].thread_elements()[e] = T(weight);
      }
    added += simd_shuffle_xor(added, ushort(1));
    added += simd_shuffle_xor(added, ushort(8));
    total = total * rescale + added;
    highest = now;

    threadgroup_barrier(mem_flags::mem_threadgroup);  // every simdgroup has read the tile as K
    load_tile<T, E, KEYS>(tile, v, rows, uint(shape.v[2]), uint(shape.v[3]), vectors, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int d = 0; d < ACROSS; d++) {
      sums[d].thread_elements()[0] *= rescale;
      sums[d].thread_elements()[1] *= rescale;
#pragma unroll
      for (int j = 0; j < DOWN; j++) {
        simdgroup_matrix<T, 8, 8> values;
        simdgroup_load(values, tile + j * 8 * WIDTH + d * 8, WIDTH);
        simdgroup_multiply_accumulate(sums[d], weights[j], values, sums[d]);
      }
    }
    k += KEYS * shape.k[2];
    v += KEYS * shape.v[2];
  }

  if (exists) {
    const float inverse = 1.0f / total;
    device T* to = out + b * shape.out[0] + n * shape.out[1] + long(query) * shape.out[2];
    const uint step = uint(shape.out[3]);
#pragma unroll
    for (int d = 0; d < ACROSS; d++) {
      const uint at = d * 8 + column;
      to[at * step] = T(sums[d].thread_elements()[0] * inverse);
      to[(at + 1) * step] = T(sums[d].thread_elements()[1] * inverse);
    }
  }
}

#define INSTANCE(T, E, KEYS)                        \
  template [[host_name("attention_" #T "_" #E)]]    \
  [[kernel]] decltype(attention<T, E, KEYS>) attention<T, E, KEYS>;
#define INSTANCES(T)   \
  INSTANCE(T, 40, 32)  \
  INSTANCE(T, 64, 32)  \
  INSTANCE(T, 80, 32)  \
  INSTANCE(T, 96, 32)  \
  INSTANCE(T, 128, 16) \
  INSTANCE(T, 160, 16)
INSTANCES(half)
INSTANCES(bfloat)
INSTANCES(float)
