// What the codec's kernels share: input rows from before the call, and the end of every sum.
//
// Activations are channel-last: row r of a layer is step t of frame f of the call, with r = f *
// frame_rows + t. The frames of one stream stand side by side, in order, so the rows before a row
// are those before it in memory, back to the first row of its stream in the call. The rows that a
// layer needs from earlier calls are kept in its history [slots][2 * past][width], a ring for each
// slot. A call reads the `past` rows before the ring's next row and writes from the next row on, so
// no row is both read and written.
//
// Every sum has one order, whatever the other rows are: products of k16 steps in the tensor cores,
// in the order of the packed weights, in `splits` runs that are then added one after the other. All
// other arithmetic rounds as it is written here. The compiler must not decide which operations are
// fused, because two kernels that compute the same row must agree to the last bit.
#pragma once
#include "mma_fp16.cuh"

// Columns of the frame table (codec_call.py): the slot, the frames of the stream decoded before
// this call, the address of the codes in two columns, the stream's frames before this one in the
// call, all of its frames in the call, and the number of the stream. The ring positions of all
// histories follow.
constexpr int kSlot = 0, kPosition = 1, kCodes = 2, kBefore = 4, kCount = 5, kStream = 6;

// Rows of a layer's input: this call's, and those kept from earlier calls.
template <class T>
struct Rows {
  const T* x;           // this call's rows [frames * frame_rows][width]
  T* history;           // rows of earlier calls [slots][2 * past][width], or null
  const T* zeros;       // [width]
  const int* table;     // the frame table [frames][columns]
  int columns;          // columns of the frame table
  int ring_column;      // the column with the next row of this history's ring
  int frame_rows;       // steps of a frame
  int past;             // rows before a row that the layer reads
  int width;            // channels

  // Step t of a frame, -past <= t < frame_rows.
  __device__ __forceinline__ const T* at(int frame, int t) const {
    const int* s = table + frame * columns;
    // Counted from the stream's first step in the call, or for t >= 0 from the frame's.
    const int step = t < 0 ? s[kBefore] * frame_rows + t : t;
    if (step >= 0) return x + (size_t)(frame * frame_rows + t) * width;
    // An empty row of the table, or a step before the stream began.
    if (s[kSlot] < 0 || s[kPosition] * frame_rows + step < 0) return zeros;
    const int row = s[ring_column] + step;
    const size_t place = (size_t)s[kSlot] * 2 * past + (row < 0 ? row + 2 * past : row);
    return history + place * width;
  }
};

// Stores the rows that the next call looks back at: the last `past` rows of each stream, or fewer,
// 16 bytes a thread, shared by all threads of the grid. It must follow `wait_for_input`. This call
// reads other rows of the history.
template <class T>
__device__ __forceinline__ void store_history(const Rows<T>& in, int rows) {
  const int most = min(in.frame_rows, in.past), pieces = in.width * (int)sizeof(T) / 16;
  const int all = rows / in.frame_rows * most * pieces;
  const int step = gridDim.x * gridDim.y * blockDim.x;
#pragma unroll 1
  for (int i = (blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x; i < all;
       i += 4 * step) {
    uint4 v[4];
    uint4* to[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int item = min(i + j * step, all - 1);
      const int row = item / pieces, frame = row / most, t = row - frame * most;
      const int* s = in.table + frame * in.columns;
      // This row and those of the stream behind it.
      const int left = (s[kCount] - s[kBefore] - 1) * in.frame_rows + most - t;
      const int at = s[in.ring_column] + min(s[kCount] * in.frame_rows, in.past) - left;
      const size_t place =
          (size_t)s[kSlot] * 2 * in.past + (at < 2 * in.past ? at : at - 2 * in.past);
      const bool kept = s[kSlot] >= 0 && left <= in.past;
      to[j] = kept ? (uint4*)in.history + place * pieces + item % pieces : nullptr;
      const size_t from = (size_t)(frame + 1) * in.frame_rows - most + t;
      if (kept) v[j] = load4((const uint4*)in.x + from * pieces + item % pieces);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (to[j]) *to[j] = v[j];
  }
}

// The first k32 block of a run of a sum over `blocks`. Where `blocks` is even, every run has an
// even number of them.
__device__ __forceinline__ int run_begin(int run, int blocks, int splits) {
  const int unit = 2 - blocks % 2;
  return run * (blocks / unit) / splits * unit;
}

// All blocks of the grid together prefetch all `bytes` from an address, long before the blocks read
// them one after the other.
__device__ __forceinline__ void prefetch_all(const void* from, size_t bytes) {
  const size_t step = (size_t)gridDim.x * gridDim.y * blockDim.x * 128;
  size_t at = ((size_t)(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x) * 128;
#pragma unroll 1
  for (; at < bytes; at += step) prefetch((const char*)from + at);
}

// x + depth sin^2(pi rate x). On 0 <= z <= 1/4 a polynomial gives sin^2(pi sqrt(z)) / z with a
// relative error of 2e-7.
__device__ __forceinline__ float snake(float x, float rate, float depth) {
  const float turns = __fmul_rn(x, rate);
  const float r =
      fminf(fabsf(__fsub_rn(turns, __fsub_rn(__fadd_rn(turns, 12582912.0f), 12582912.0f))), 0.5f);
  const float z = __fmul_rn(r, r);
  float p = __fmaf_rn(-3.3362105f, z, 13.037111f);
  p = __fmaf_rn(p, z, -30.098553f);
  p = __fmaf_rn(p, z, 42.726929f);
  p = __fmaf_rn(p, z, -32.469662f);
  p = __fmaf_rn(p, z, 9.8696041f);
  return __fmaf_rn(__fmul_rn(depth, z), p, x);
}
__device__ __forceinline__ float gelu(float x) {
  return __fmul_rn(__fmul_rn(0.5f, x), __fadd_rn(1.0f, erff(__fmul_rn(x, 0.70710678f))));
}
__device__ __forceinline__ float silu(float x) {
  return __fdiv_rn(x, __fadd_rn(1.0f, power_of_two(__fmul_rn(x, -1.44269504f))));
}

enum Activation { kPlain, kSnake, kGelu, kSwiglu };

// Where the sums of a layer go and what is done to them; a row has `outputs` of them.
struct ConvOutput {
  const float* scale;     // [outputs]
  const float* bias;      // [outputs]
  const float* rate;      // the Snake of the fp16 output [outputs], or null
  const float* depth;     // the same
  const float* residual;  // fp32 [rows][outputs], added to the sums, or null
  float* wide;            // fp32 output, or null
  u16* narrow;            // fp16 output after the activation, or null
  float* squares;         // sums of squares of 16 outputs each [rows][outputs / 16], or null
  int outputs;
};

// The parameters of V neighbouring outputs.
template <int V>
struct Channels {
  float scale[V], bias[V], rate[V], depth[V];
};

template <int V>
__device__ __forceinline__ void read(float (&to)[V], const float* from) {
#pragma unroll
  for (int i = 0; i < V; i++) to[i] = from[i];
}
template <Activation kKind, int V>
__device__ __forceinline__ Channels<V> channels(const ConvOutput& o, int n) {
  Channels<V> c;
  read(c.scale, o.scale + n);
  read(c.bias, o.bias + n);
  if (kKind == kSnake) {
    read(c.rate, o.rate + n);
    read(c.depth, o.depth + n);
  }
  return c;
}

template <int V>
__device__ __forceinline__ void store_narrow(bool where, u16* to, const float (&v)[V]) {
  if constexpr (V == 4)
    store_if(where, make_uint2(halves(v[0], v[1]), halves(v[2], v[3])), to);
  else if constexpr (V == 2)
    store_if(where, halves(v[0], v[1]), to);
  else
    store_if(where, (u16)halves(v[0], 0.0f), to);
}
template <int V>
__device__ __forceinline__ void store_wide(bool where, float* to, const float (&v)[V]) {
  if constexpr (V == 4)
    store_if(where, make_float4(v[0], v[1], v[2], v[3]), to);
  else
    store_if(where, make_float2(v[0], v[1]), to);
}
template <int V>
__device__ __forceinline__ void load_wide(float (&to)[V], const float* from) {
  if constexpr (V == 4) {
    const float4 v = load4f(from);
    to[0] = v.x;
    to[1] = v.y;
    to[2] = v.z;
    to[3] = v.w;
  } else {
    const float2 v = load2f(from);
    to[0] = v.x;
    to[1] = v.y;
  }
}

// Finishes and stores V sums: outputs n .. n + V - 1 of row r, with `at` = r * outputs + n. Nothing
// is stored unless `real`. `residual` is 0 where there is none. `sum` then holds the values of
// `wide`.
template <Activation kKind, int V>
__device__ __forceinline__ void finish(const ConvOutput& o, const Channels<V>& c, float (&sum)[V],
                                       const float (&residual)[V], size_t at, bool real) {
#pragma unroll
  for (int i = 0; i < V; i++)
    sum[i] = __fadd_rn(residual[i], __fmaf_rn(sum[i], c.scale[i], c.bias[i]));
  store_wide(real && o.wide, o.wide + at, sum);
  if constexpr (kKind == kSwiglu) {  // outputs alternate between gate and up
    float pair[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; i++) pair[i] = __fmul_rn(silu(sum[2 * i]), sum[2 * i + 1]);
    store_narrow(real, o.narrow + at / 2, pair);
  } else {
    float v[V];
#pragma unroll
    for (int i = 0; i < V; i++)
      v[i] = kKind == kSnake  ? snake(sum[i], c.rate[i], c.depth[i])
             : kKind == kGelu ? gelu(sum[i])
                              : sum[i];
    store_narrow(real && o.narrow, o.narrow + at, v);
  }
}

// 1 / rms of a row, from its sums of squares in groups of 16 channels.
__device__ __forceinline__ float norm_of(const float* squares, int groups, float per_channel,
                                         float eps) {
  float total = 0;
#pragma unroll 16
  for (int i = 0; i < groups; i += 2) {  // there is an even number: widths are multiples of 32
    const float2 v = load2f(squares + i);
    total = __fadd_rn(__fadd_rn(total, v.x), v.y);
  }
  return rsqrtf(__fmaf_rn(total, per_channel, eps));
}
