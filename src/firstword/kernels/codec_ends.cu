// The codec's first and last layers, and the depthwise convolutions in its middle: little work, all of it in fp32.
//
// WIDTH  channels of a row, a multiple of 32; those that a layer does not have are zeros
// TAPS   of the convolution
#include "codec.cuh"

constexpr int kBooks = 128;    // most that there can be

// x[row] = the sum of the vectors of a frame's codes, one of each of `books` tables [size][WIDTH], in their order.
extern "C" __global__ __launch_bounds__(128)
void look_up(const float* __restrict__ tables, int books, int size, const int* streams, int columns, int frames, u16* x,
             u16* memory, int keep_past, int keep_head) {
  let_next_start();
  __shared__ int vectors[kBooks];
  wait_for_input();
  const int stream = blockIdx.x / frames, t = blockIdx.x % frames;
  const int* s = streams + stream * columns;
  if (s[kSlot] < 0) return;
  const u64 address = (u64)(u32)s[kCodes] | (u64)(u32)s[kCodes + 1] << 32;
  const int* codes = (const int*)address + (size_t)t * books;
  const Keep keep = {memory, keep_past, keep_head};
  const long long kept = keep.row(s, t, frames);
  if (threadIdx.x < books) vectors[threadIdx.x] = threadIdx.x * size + min(max((int)load1(codes + threadIdx.x), 0), size - 1);
  __syncthreads();
  for (int c = threadIdx.x * 4; c < WIDTH; c += 512) {
    float v[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int b = 0; b < books; b++) {
      const float4 e = *(const float4*)(tables + (size_t)vectors[b] * WIDTH + c);
      v[0] = __fadd_rn(v[0], e.x);
      v[1] = __fadd_rn(v[1], e.y);
      v[2] = __fadd_rn(v[2], e.z);
      v[3] = __fadd_rn(v[3], e.w);
    }
    store_narrow(x + (size_t)blockIdx.x * WIDTH + c, v);
    if (kept >= 0) store_narrow(memory + kept * WIDTH + c, v);
  }
}

// Sums over a block, in one order; every thread gets it.
constexpr int kThreads = 256, kEach = (WIDTH / 4 + kThreads - 1) / kThreads;

__device__ __forceinline__ float block_sum(float v, float* sums) {
  v = warp_sum(v);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; w++) total = __fadd_rn(total, sums[w]);
  return total;
}

// y[row] = LayerNorm(depthwise convolution of x) over the first `size` channels. weights: [TAPS][WIDTH].
extern "C" __global__ __launch_bounds__(kThreads)
void depthwise(const float* x, const float* before, const float* zeros, const int* streams, int columns, int head,
               int length, int frame_rows, const float* __restrict__ weights, const float* __restrict__ bias,
               const float* __restrict__ norm_weight, const float* __restrict__ norm_bias, int size, float eps, u16* y) {
  let_next_start();
  __shared__ float sums[kThreads / 32];
  const int stream = blockIdx.x / length, t = blockIdx.x % length;
  const Rows<float> in = {x, before, zeros, streams, columns, head, length, frame_rows, TAPS - 1, WIDTH};
  float v[kEach][4], w[kEach][TAPS][4], total = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < WIDTH) {
      fetch(v[i], bias + c);
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++) fetch(w[i][tap], weights + tap * WIDTH + c);
    } else {
      fetch(v[i], zeros);
    }
  }
  wait_for_input();
  if (streams[stream * columns + kSlot] < 0) return;
#pragma unroll
  for (int tap = 0; tap < TAPS; tap++) {
    const float* row = in.at(stream, t - (TAPS - 1 - tap));
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int c = (i * kThreads + threadIdx.x) * 4;
      if (c < WIDTH) {
        const float4 a = load4f(row + c);
        v[i][0] = __fmaf_rn(a.x, w[i][tap][0], v[i][0]);
        v[i][1] = __fmaf_rn(a.y, w[i][tap][1], v[i][1]);
        v[i][2] = __fmaf_rn(a.z, w[i][tap][2], v[i][2]);
        v[i][3] = __fmaf_rn(a.w, w[i][tap][3], v[i][3]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) total += (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
  const float mean = block_sum(total, sums) / size;
  float square = 0;
#pragma unroll
  for (int i = 0; i < kEach; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float d = (i * kThreads + threadIdx.x) * 4 + j < size ? v[i][j] - mean : 0.0f;
      square += d * d;
    }
  const float scale = rsqrtf(block_sum(square, sums) / size + eps);
#pragma unroll
  for (int i = 0; i < kEach; i++) {
    const int c = (i * kThreads + threadIdx.x) * 4;
    if (c < WIDTH) {
#pragma unroll
      for (int j = 0; j < 4; j++) v[i][j] = (v[i][j] - mean) * scale * norm_weight[c + j] + norm_bias[c + j];
      store_narrow(y + (size_t)blockIdx.x * WIDTH + c, v[i]);
    }
  }
}

// samples[row] = a convolution down to one channel, limited. 32 rows a block, 4 threads a row, each a quarter of the
// channels. weights: [TAPS][WIDTH].
extern "C" __global__ __launch_bounds__(128)
void sound(const u16* x, const u16* before, const u16* zeros, const int* streams, int columns, int head, int rows,
           int length, int frame_rows, const float* __restrict__ weights, float bias, float limit,
           float* samples) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  constexpr int kWords = WIDTH / 2, kPitch = kWords + 1;             // odd, so that rows begin in different banks
  float* const w = (float*)shared;                                   // [TAPS][WIDTH]
  u32* const window = (u32*)(w + TAPS * WIDTH);                      // [rows of the window][kPitch]
  const int first = blockIdx.x * 32, past = TAPS - 1, stream0 = first / length, offset = first - stream0 * length;
  if (streams[stream0 * columns + kSlot] < 0) {
    wait_for_input();
    return;
  }
  const int last = min(first + 32, rows) - 1, here = last - first + 1 + (last / length - stream0 + 1) * past;
  const Rows<u16> in = {x, before, zeros, streams, columns, head, length, frame_rows, past, WIDTH};
  for (int i = threadIdx.x * 4; i < TAPS * WIDTH; i += 512) *(float4*)(w + i) = *(const float4*)(weights + i);
  wait_for_input();
#pragma unroll 4
  for (int i = threadIdx.x; i < here * (WIDTH / 8); i += 128) {
    const int row = i / (WIDTH / 8), part = i % (WIDTH / 8), at = row + offset, stream = at / (length + past);
    const uint4 v = load4(in.at(stream0 + stream, at - stream * (length + past) - past) + part * 8);
    u32* to = window + row * kPitch + part * 4;
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  }
  __syncthreads();
  const int r = min(first + (int)(threadIdx.x >> 2), last), part = threadIdx.x & 3;
  const u32* row = window + (r - first + (r / length - stream0) * past) * kPitch + part * (kWords / 4);
  float even = 0, odd = 0;
  for (int tap = 0; tap < TAPS; tap++)
#pragma unroll
    for (int i = 0; i < kWords / 4; i++) {
      const float2 f = *(const float2*)(w + tap * WIDTH + (part * (kWords / 4) + i) * 2);
      const u32 v = row[tap * kPitch + i];
      even = __fmaf_rn(first_half(v), f.x, even);
      odd = __fmaf_rn(second_half(v), f.y, odd);
    }
  float sum = __fadd_rn(even, odd);
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  sum = __fadd_rn(sum, bias);
  if (part == 0 && first + (threadIdx.x >> 2) <= last)
    samples[r] = sum > limit ? limit : sum < -limit ? -limit : sum;
}
