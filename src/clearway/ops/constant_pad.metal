// out = x with `value` around it, up to five axes; negative amounts cut.
//
// Arguments, in order:
//   0 x      five axes by strides, the first ones of size 1 where it has fewer
//   1 out    as x
//   2 shape  int64, five each: sizes of out, sizes of x, strides of x, strides of out, amounts before
//   3 value  float32
// Launch: threads [out size 4, out size 3, product of out sizes 0 to 2], group_size [min(256, 32s), 1, 1].
// Names: constant_pad_<type>.
//
// Here because MPSGraph's is silently wrong at rank 5 for inner extents from 65536 on in torch 2.13 (issues
// 194922, 194944, 195147); torch 2.15 has a Metal kernel of its own.
#include <metal_stdlib>
using namespace metal;

struct PadShape {
  long out_size[5], x_size[5], x_stride[5], out_stride[5], before[5];
};

template <typename T>
kernel void constant_pad(device const T* x [[buffer(0)]], device T* out [[buffer(1)]],
                         constant PadShape& shape [[buffer(2)]], constant float& value [[buffer(3)]],
                         uint3 place [[thread_position_in_grid]]) {
  long at[5];
  at[4] = place.x;
  at[3] = place.y;
  at[2] = place.z % uint(shape.out_size[2]);
  const uint rest = place.z / uint(shape.out_size[2]);
  at[1] = rest % uint(shape.out_size[1]);
  at[0] = rest / uint(shape.out_size[1]);

  long from = 0, to = 0;
  bool inside = true;
#pragma unroll
  for (int d = 0; d < 5; d++) {
    const long i = at[d] - shape.before[d];
    inside = inside && i >= 0 && i < shape.x_size[d];
    from += i * shape.x_stride[d];
    to += at[d] * shape.out_stride[d];
  }
  out[to] = inside ? x[from] : T(value);
}

#define INSTANCE(T)                           \
  template [[host_name("constant_pad_" #T)]]  \
  [[kernel]] decltype(constant_pad<T>) constant_pad<T>;
INSTANCE(half)
INSTANCE(bfloat)
INSTANCE(float)
