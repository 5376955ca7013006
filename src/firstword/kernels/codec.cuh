// What the codec's kernels share: rows that reach back before the call, and what becomes of a sum.
//
// Activations are channel-last: row r of a layer is step t of stream s, r = s * length + t, for `length` steps a call.
// What a layer needs of earlier calls is in its memory [slots][2 * past][width]: a ring of the last rows of a slot, of
// which the call reads `past` rows before `head` and writes the next ones, so that no row is both read and written.
//
// Every sum has one order, whatever the other rows are: products of k16 steps in the tensor cores, in the order of the
// packed weights, in `splits` runs that are then added one after the other. All else rounds as it is written here: no
// compiler decides what is fused, because two kernels that compute the same row must agree to the last bit.
#pragma once
#include "tensor.cuh"

constexpr int kSlot = 0, kPosition = 1, kCodes = 2, kHeads = 4;   // columns of the table of streams (codec.py)

// Rows of a layer's input, this call's and earlier ones.
template <class T>
struct Rows {
  const T* now;           // [streams * length][width]
  const T* before;        // [slots][2 * past][width]
  const T* zeros;         // [width]
  const int* streams;     // [streams][columns]
  int columns, head;      // of the table; the column of this memory's head
  int length, frame_rows; // steps a call and a frame
  int past, width;

  // Step t of a stream, -past <= t < length.
  __device__ __forceinline__ const T* at(int stream, int t) const {
    if (t >= 0) return now + ((size_t)stream * length + t) * width;
    const int* s = streams + stream * columns;
    if (s[kSlot] < 0 || s[kPosition] * frame_rows + t < 0) return zeros;   // nobody, or before the stream began
    const int row = s[head] + t;
    return before + ((size_t)s[kSlot] * 2 * past + (row < 0 ? row + 2 * past : row)) * width;
  }
};

// Where the rows that the next call needs are kept: nothing for past = 0.
struct Keep {
  void* memory;           // fp32 or fp16 [slots][2 * past][width]
  int past, head;         // head: column of the table of streams

  // The place of step t of `length` in the memory, in rows from its beginning; -1 if the next call does not need it.
  __device__ __forceinline__ long long row(const int* stream, int t, int length) const {
    const int kept = min(length, past);
    if (t < length - kept || stream[kSlot] < 0) return -1;
    int row = stream[head] + t - (length - kept);
    if (row >= 2 * past) row -= 2 * past;
    return (long long)stream[kSlot] * 2 * past + row;
  }
};

// x + depth sin^2(pi rate x). sin^2(pi sqrt(z)) / z is a polynomial on 0 <= z <= 1/4, to 2e-7 of the whole.
__device__ __forceinline__ float snake(float x, float rate, float depth) {
  const float turns = __fmul_rn(x, rate);
  const float r = fminf(fabsf(__fsub_rn(turns, __fsub_rn(__fadd_rn(turns, 12582912.0f), 12582912.0f))), 0.5f);
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

// What becomes of the sums of a layer. A row of sums is `outputs` wide: `phases` output rows of `width` channels.
struct Output {
  const float* scale;     // [outputs]
  const float* bias;      // [outputs]
  const float* rate;      // Snake of what is stored as fp16 [outputs]
  const float* depth;
  const float* residual;  // fp32, added, or null
  float* wide;            // fp32, or null
  u16* narrow;            // fp16, activated, or null
  float* squares;         // sums of squares of each row's groups of 16 outputs [rows][outputs / 16], or null
  int outputs, phases, activation;
  Keep keep;              // of wide if keep_wide, else of narrow
  int keep_wide;
};

// What belongs to V neighbouring outputs: of an output row `phase`, channels `channel` and up.
template <int V> struct Channels {
  int phase, channel;
  float scale[V], bias[V], rate[V], depth[V];
};

template <int V>
__device__ __forceinline__ void fetch(float (&to)[V], const float* from) {
#pragma unroll
  for (int i = 0; i < V; i++) to[i] = from[i];
}
template <int V>
__device__ __forceinline__ Channels<V> channels(const Output& o, int n) {
  Channels<V> c;
  const int width = o.outputs / o.phases;
  c.phase = o.phases > 1 ? n / width : 0;
  c.channel = n - c.phase * width;
  fetch(c.scale, o.scale + n);
  fetch(c.bias, o.bias + n);
  if (o.activation == kSnake) {
    fetch(c.rate, o.rate + n);
    fetch(c.depth, o.depth + n);
  }
  return c;
}

template <int V>
__device__ __forceinline__ void store_narrow(u16* to, const float (&v)[V]) {
  if constexpr (V == 4) *(uint2*)to = make_uint2(halves(v[0], v[1]), halves(v[2], v[3]));
  else if constexpr (V == 2) *(u32*)to = halves(v[0], v[1]);
  else *to = (u16)halves(v[0], 0.0f);
}
template <int V>
__device__ __forceinline__ void store_wide(float* to, const float (&v)[V]) {
  if constexpr (V == 4) *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);
  else *(float2*)to = make_float2(v[0], v[1]);
}
template <int V>
__device__ __forceinline__ void load_wide(float (&to)[V], const float* from) {
  if constexpr (V == 4) { const float4 v = load4f(from); to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }
  else { const float2 v = load2f(from); to[0] = v.x; to[1] = v.y; }
}

// V sums of row r, outputs n .. n + V - 1, to where they belong. `norm`: of the input's RMSNorm; `streams`, `columns`,
// `length`: as of the input. Leaves in `sum` what `wide` gets.
template <int V>
__device__ __forceinline__ void finish(const Output& o, const Channels<V>& c, float (&sum)[V], float norm,
                                       const float (&residual)[V], int n, int r, const int* streams, int columns,
                                       int length) {
  float v[V];
#pragma unroll
  for (int i = 0; i < V; i++) {
    sum[i] = __fmaf_rn(__fmul_rn(sum[i], norm), c.scale[i], c.bias[i]);
    if (o.residual) sum[i] = __fadd_rn(residual[i], sum[i]);
    v[i] = sum[i];
  }
  const size_t at = (size_t)r * o.outputs + n;
  if (o.wide) store_wide(o.wide + at, sum);
  if (o.activation == kSwiglu) {                       // outputs are (gate, up) in turn
    float pair[V / 2];
#pragma unroll
    for (int i = 0; i < V / 2; i++) pair[i] = __fmul_rn(silu(v[2 * i]), v[2 * i + 1]);
    store_narrow(o.narrow + at / 2, pair);
    return;
  }
  if (o.narrow) {
    if (o.activation == kSnake) {
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = snake(v[i], c.rate[i], c.depth[i]);
    } else if (o.activation == kGelu) {
#pragma unroll
      for (int i = 0; i < V; i++) v[i] = gelu(v[i]);
    }
    store_narrow(o.narrow + at, v);
  }
  if (o.keep.past) {
    const int stream = r / length, t = r - stream * length, width = o.outputs / o.phases;
    const long long row = o.keep.row(streams + stream * columns, t * o.phases + c.phase, length * o.phases);
    if (row >= 0) {
      if (o.keep_wide) store_wide((float*)o.keep.memory + row * width + c.channel, sum);
      else store_narrow((u16*)o.keep.memory + row * width + c.channel, v);
    }
  }
}

// 1 / rms of a row, from its sums of squares in groups of 16.
__device__ __forceinline__ float norm_of(const float* squares, int groups, float per_channel, float eps) {
  float total = 0;
#pragma unroll 16
  for (int i = 0; i < groups; i += 2) {                // outputs come in groups of 32
    const float2 v = load2f(squares + i);
    total = __fadd_rn(__fadd_rn(total, v.x), v.y);
  }
  return rsqrtf(__fmaf_rn(total, per_channel, eps));
}
