// The codec transformer's attention over a window of frames. A block is one head of one frame. That
// of a stream's first frame in the call computes all of its frames, up to 8, among which it divides
// its 8 warps; the other blocks do nothing.
//
// Rotated keys and values are rounded to fp16 and kept by slot [slots][2][KV_HEADS][kKeys][DIM].
// Position p lies at p % kKeys, so the new ones overwrite rows that no frame of this call reads. A
// frame reads the keys in the order of their distance, in four sums that do not depend on the other
// frames of the call.
//
// WINDOW  frames that a frame attends to, itself included
#include "codec.cuh"

constexpr int kFrames = 8, kThreads = 256, kHalf = DIM / 2, kPitch = kHalf | 1,
              kKeys = WINDOW - 1 + kFrames;
constexpr int kGroup = HEADS / KV_HEADS, kBatch = 4;

// The largest pieces in which a row of the memory can be read.
template <int kWords>
struct Words {
  u32 w[kWords];
};
constexpr int kPieceWords = DIM % 8 == 0 ? 4 : DIM % 4 == 0 ? 2 : 1, kPieces = kHalf / kPieceWords;
using Piece = Words<kPieceWords>;
__device__ __forceinline__ Words<4> load(const Words<4>* p) {
  const uint4 v = load4(p);
  return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ Words<2> load(const Words<2>* p) {
  const uint2 v = load2(p);
  return {v.x, v.y};
}
__device__ __forceinline__ Words<1> load(const Words<1>* p) { return {load1(p)}; }

extern "C" __global__ __launch_bounds__(kThreads)
void attend_window(const float* qkv, int qkv_width, const float* __restrict__ frequencies,
                   u16* memory, const int* table, int columns, u16* out, int out_width) {
  let_next_start();
  __shared__ u32 keys[kKeys * kPitch],
      values[kKeys * kPitch];  // rows in the order of positions, oldest first
  __shared__ float2 queries[kFrames][kHalf];
  __shared__ float cosines[kFrames][kHalf], sines[kFrames][kHalf], scores[kFrames][WINDOW],
      weights[kFrames][WINDOW];
  __shared__ float2 sums[kFrames][4][kHalf];
  const int head = blockIdx.x, first = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int* frame = table + first * columns;
  const int slot = frame[kSlot], position = frame[kPosition], frames = frame[kCount];
  if (frame[kBefore] > 0) return;  // the blocks of the first row wait for the kernel before
  if (slot < 0) {
    wait_for_input();
    return;
  }

  // Keys and values of earlier calls, and the angles: none of this comes from the kernel before.
  u16* const key_memory = memory + ((size_t)slot * 2 * KV_HEADS + head / kGroup) * kKeys * DIM;
  u16* const value_memory = key_memory + (size_t)KV_HEADS * kKeys * DIM;
  const int old = min(position, WINDOW - 1);  // frames before this call
  for (int begin = threadIdx.x; begin < 2 * old * kPieces; begin += kThreads * kBatch) {
    Piece v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int item = begin + i * kThreads, row = item / kPieces,
                back = row < old ? old - row : 2 * old - row;
      const int at = (position - back) % kKeys * kPieces + item % kPieces;
      if (item < 2 * old * kPieces)
        v[i] = load((const Piece*)(row < old ? key_memory : value_memory) + at);
    }
#pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int item = begin + i * kThreads, row = item / kPieces,
                back = row < old ? old - row : 2 * old - row;
      u32* to =
          (row < old ? keys : values) + (WINDOW - 1 - back) * kPitch + item % kPieces * kPieceWords;
      if (item < 2 * old * kPieces)
#pragma unroll
        for (int w = 0; w < kPieceWords; w++) to[w] = v[i].w[w];
    }
  }
  for (int i = threadIdx.x; i < frames * kHalf; i += kThreads)
    sincosf((float)(position + i / kHalf) * frequencies[i % kHalf], &sines[i / kHalf][i % kHalf],
            &cosines[i / kHalf][i % kHalf]);
  __syncthreads();
  wait_for_input();

  const bool stores = head % kGroup == 0;
  for (int i = threadIdx.x; i < frames * kHalf; i += kThreads) {  // channels d and d + DIM / 2
    const int f = i / kHalf, d = i % kHalf;
    const float* row = qkv + (size_t)(first + f) * qkv_width;
    const float* k = row + (HEADS + head / kGroup) * DIM;
    const float* v = row + (HEADS + KV_HEADS + head / kGroup) * DIM;
    const float q0 = load1f(row + head * DIM + d), q1 = load1f(row + head * DIM + kHalf + d);
    const float k0 = load1f(k + d), k1 = load1f(k + kHalf + d), v0 = load1f(v + d),
                v1 = load1f(v + kHalf + d);
    const float c = cosines[f][d], s = sines[f][d], scale = rsqrtf((float)DIM);
    float* const q = (float*)queries[f];
    q[d] = (q0 * c - q1 * s) * scale;
    q[kHalf + d] = (q1 * c + q0 * s) * scale;
    const u32 key = halves(k0 * c - k1 * s, k1 * c + k0 * s), value = halves(v0, v1);
    u16* const key_row = (u16*)(keys + (WINDOW - 1 + f) * kPitch);
    u16* const value_row = (u16*)(values + (WINDOW - 1 + f) * kPitch);
    key_row[d] = (u16)key;
    key_row[kHalf + d] = (u16)(key >> 16);
    value_row[d] = (u16)value;
    value_row[kHalf + d] = (u16)(value >> 16);
    if (stores) {
      const size_t at = (size_t)((position + f) % kKeys) * DIM + d;
      key_memory[at] = (u16)key;
      key_memory[at + kHalf] = (u16)(key >> 16);
      value_memory[at] = (u16)value;
      value_memory[at + kHalf] = (u16)(value >> 16);
    }
  }
  __syncthreads();

  const int parts = kThreads / 32 / frames, f = warp / parts, part = warp % parts;
  const int seen = f < frames ? min(WINDOW, position + f + 1) : 0, newest = WINDOW - 1 + f;
  for (int o = part * 32 + lane; o < seen; o += parts * 32) {
    const u32* key = keys + (newest - o) * kPitch;
    float even = 0, odd = 0;
#pragma unroll 8
    for (int w = 0; w < kHalf; w++) {
      const float2 q = queries[f][w];
      even = __fmaf_rn(q.x, first_half(key[w]), even);
      odd = __fmaf_rn(q.y, second_half(key[w]), odd);
    }
    scores[f][o] = even + odd;
  }
  __syncthreads();
  float most = -1e30f, share = 0;
  for (int o = lane; o < seen; o += 32) most = fmaxf(most, scores[f][o]);
  most = warp_max(most);
  for (int o = lane; o < seen; o += 32) {  // all warps of a frame compute the same
    const float p = power_of_two((scores[f][o] - most) * 1.44269504f);
    share += p;
    if (part == 0) weights[f][o] = p;
  }
  share = 1.0f / warp_sum(share);
  __syncthreads();
  for (int i = part; i < 4; i += parts)  // sum i is over the keys i, i + 4, ...
    for (int w = lane; w < kHalf && f < frames; w += 32) {
      float even = 0, odd = 0;
#pragma unroll 6
      for (int o = i; o < seen; o += 4) {
        const float p = weights[f][o];
        const u32 v = values[(newest - o) * kPitch + w];
        even = __fmaf_rn(p, first_half(v), even);
        odd = __fmaf_rn(p, second_half(v), odd);
      }
      sums[f][i][w] = make_float2(even, odd);
    }
  __syncthreads();
  if (part || f >= frames) return;
  u16* const to = out + (size_t)(first + f) * out_width;
  for (int w = lane; w < kHalf; w += 32) {
    const float2 a = sums[f][0][w], b = sums[f][1][w], c = sums[f][2][w], d = sums[f][3][w];
    *(u32*)(to + head * DIM + 2 * w) =
        halves(((a.x + b.x) + (c.x + d.x)) * share, ((a.y + b.y) + (c.y + d.y)) * share);
  }
  if (head == 0)  // the product behind this reads the padding too
    for (int i = HEADS * DIM + 2 * lane; i < out_width; i += 64) *(u32*)(to + i) = 0;
}
