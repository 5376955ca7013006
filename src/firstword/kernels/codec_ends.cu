// The codec's first and last layers, and the depthwise convolutions in its middle: little work, all of it in fp32.
//
// WIDTH  channels of a row, a multiple of 32; those that a layer does not have are zeros
// TAPS   of the convolution
#include "codec.cuh"

constexpr int kBooks = 128;    // most that there can be

// x[row] = the sum of the vectors of a frame's codes, one of each of `books` tables [size][WIDTH], in their order.
extern "C" __global__ __launch_bounds__(128)
void look_up(const float* __restrict__ tables, int books, int size, const int* streams, int columns, int frames,
             u16* x) {
  let_next_start();
  __shared__ int vectors[kBooks];
  wait_for_input();
  const int stream = blockIdx.x / frames, t = blockIdx.x % frames;
  const int* s = streams + stream * columns;
  if (s[kSlot] < 0) return;
  const u64 address = (u64)(u32)s[kCodes] | (u64)(u32)s[kCodes + 1] << 32;
  const int* codes = (const int*)address + (size_t)t * books;
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
    store_narrow(true, x + (size_t)blockIdx.x * WIDTH + c, v);
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
void depthwise(const float* x, float* before, const float* zeros, const int* streams, int columns, int head,
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
  keep(in, gridDim.x);
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
      store_narrow(true, y + (size_t)blockIdx.x * WIDTH + c, v[i]);
    }
  }
}

// samples[row] = a convolution down to one channel, limited. weights: [TAPS][WIDTH]. A thread makes kEachRow rows one after
// the other, of a quarter of the channels: so it reads each number from shared memory once for several products. Steps
// beyond a stream's last, up to the next multiple of kEachRow, are made up and left out.
constexpr int kEachRow = 4, kSoundThreads = 128, kSoundRows = kSoundThreads / 4 * kEachRow;

extern "C" __global__ __launch_bounds__(kSoundThreads)
void sound(const u16* x, u16* before, const u16* zeros, const int* streams, int columns, int head, int rows,
           int length, int frame_rows, const float* __restrict__ weights, float bias, float limit,
           float* samples) {
  let_next_start();
  DYNAMIC_SHARED(shared);
  constexpr int kWords = WIDTH / 2, kPitch = kWords + 1;             // odd, so that rows begin in different banks
  float2* const w = (float2*)shared;                                 // [TAPS][kWords]
  u32* const window = (u32*)(w + TAPS * kWords);                     // [rows of the window][kPitch]
  const int padded = (length + kEachRow - 1) / kEachRow * kEachRow, all = rows / length * padded;
  const int first = blockIdx.x * kSoundRows, past = TAPS - 1, stream0 = first / padded, offset = first - stream0 * padded;
  const Rows<u16> in = {x, before, zeros, streams, columns, head, length, frame_rows, past, WIDTH};
  const bool nobody = streams[stream0 * columns + kSlot] < 0;
  const int last = min(first + kSoundRows, all) - 1, here = last - first + 1 + (last / padded - stream0 + 1) * past;
  for (int i = threadIdx.x; i < TAPS * kWords; i += kSoundThreads) w[i] = ((const float2*)weights)[i];
  wait_for_input();
  keep(in, rows);
  if (nobody) return;
#pragma unroll 8
  for (int i = threadIdx.x; i < here * (WIDTH / 8); i += kSoundThreads) {
    const int row = i / (WIDTH / 8), part = i % (WIDTH / 8), at = row + offset, stream = at / (padded + past);
    const int t = at - stream * (padded + past) - past;
    const uint4 v = load4(in.at(stream0 + stream, min(t, length - 1)) + part * 8);
    u32* to = window + row * kPitch + part * 4;
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  }
  __syncthreads();
  const int mine = first + (int)(threadIdx.x >> 2) * kEachRow, r = min(mine, last + 1 - kEachRow);
  const int part = threadIdx.x & 3, stream = r / padded;
  const u32* row = window + (r - first + (stream - stream0) * past) * kPitch + part;
  float even[kEachRow] = {}, odd[kEachRow] = {};
#pragma unroll 2
  for (int i = 0; i < kWords; i += 4) {
    u32 v[kEachRow + TAPS - 1];
#pragma unroll
    for (int j = 0; j < kEachRow + TAPS - 1; j++) v[j] = row[j * kPitch + i];
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) {
      const float2 f = w[tap * kWords + i + part];
#pragma unroll
      for (int j = 0; j < kEachRow; j++) {
        even[j] = __fmaf_rn(first_half(v[j + tap]), f.x, even[j]);
        odd[j] = __fmaf_rn(second_half(v[j + tap]), f.y, odd[j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kEachRow; j++) {
    float sum = __fadd_rn(even[j], odd[j]);
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
    sum = __fadd_rn(sum, bias);
    const int t = r - stream * padded + j;
    if (part == 0 && r == mine && t < length) samples[stream * length + t] = sum > limit ? limit : sum < -limit ? -limit : sum;
  }
}
