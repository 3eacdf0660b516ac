// Fewer bits for communication: 8 signs a byte, and 8-bit integers with a scale a block of elements.
// -DSRC: storage type of what is quantised; -DDST: of what comes back.

// -- signs, of fp32. error, where there is one, is added to the values first.

// The corrected elements i to i + 3, without those from stop on.
__device__ inline Vector<float> corrected(const float* values, const float* error, int64 i, int64 stop, bool whole) {
  Vector<float> x = load(values, i, stop, whole), more = load(error, i, stop, whole);
#pragma unroll
  for (int k = 0; k < VECTOR; ++k) x.at[k] += more.at[k];
  return x;
}

// sums[b] = sum of |x| over the elements [b * size, (b + 1) * size), one CUDA block each; size: a multiple of 8.
extern "C" __global__ void magnitude_sums(const float* values, const float* error, int64 numel, int64 size,
                                          double* sums) {
  bool fits = aligned(values) && aligned(error);
  for (int64 b = blockIdx.x; b * size < numel; b += gridDim.x) {
    int64 stop = (b + 1) * size < numel ? (b + 1) * size : numel;
    double sum = 0;
    for (int64 i = b * size + threadIdx.x * VECTOR; i < stop; i += THREADS * VECTOR) {
      Vector<float> x = corrected(values, error, i, stop, fits && i + VECTOR <= stop);
      for (int k = 0; k < VECTOR; ++k) sum += fabsf(x.at[k]);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[b] = sum;
  }
}

// Bit i % 8 of byte i / 8 is 1 where x >= 0. A thread makes one byte; error becomes what the signs leave out.
// block: elements that share a scale, a multiple of 8.
extern "C" __global__ void pack_signs(const float* values, float* error, int64 numel, int64 block,
                                      const float* scales, uint8* signs) {
  bool fits = aligned(values) && aligned(error);
  for (int64 byte = first_index(); byte * 8 < numel; byte += index_stride()) {
    uint32 bits = 0;
    float scale = scales[byte * 8 / block];
#pragma unroll
    for (int first = 0; first < 8; first += VECTOR) {
      int64 i = byte * 8 + first;
      bool whole = fits && i + VECTOR <= numel;
      Vector<float> x = corrected(values, error, i, numel, whole);
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) {
        bool positive = x.at[k] >= 0 && i + k < numel;
        bits |= (uint32)positive << (first + k);
        x.at[k] -= positive ? scale : -scale;
      }
      store(error, i, numel, whole, x);
    }
    signs[byte] = bits;
  }
}

extern "C" __global__ void unpack_signs(const uint8* signs, const float* scales, int64 numel, int64 block,
                                        float* values) {
  bool fits = aligned(values);
  for (int64 byte = first_index(); byte * 8 < numel; byte += index_stride()) {
    uint32 bits = signs[byte];
    float scale = scales[byte * 8 / block];
#pragma unroll
    for (int first = 0; first < 8; first += VECTOR) {
      int64 i = byte * 8 + first;
      Vector<float> result;
#pragma unroll
      for (int k = 0; k < VECTOR; ++k) result.at[k] = (bits >> (first + k)) & 1 ? scale : -scale;
      store(values, i, numel, fits && i + VECTOR <= numel, result);
    }
  }
}

// -- 8-bit integers; block: elements that share a scale, a multiple of VECTOR

__device__ inline float larger(float a, float b) { return b > a || b != b ? b : a; }  // NaN if either is

// One warp a block of elements: the largest magnitude, then the codes. NaN and inf make the scale not finite.
extern "C" __global__ void quantize_int8(const SRC* source, int64 numel, int64 block, signed char* codes,
                                         float* scales) {
  int64 lane = threadIdx.x % 32 * VECTOR;
  bool fits = aligned(source) && aligned(codes);
  for (int64 b = first_index() / 32; b * block < numel; b += index_stride() / 32) {
    int64 stop = (b + 1) * block < numel ? (b + 1) * block : numel;
    float largest = 0;
    for (int64 i = b * block + lane; i < stop; i += 32 * VECTOR) {
      Vector<SRC> in = load(source, i, stop, fits && i + VECTOR <= stop);
      for (int k = 0; k < VECTOR; ++k) largest = larger(largest, fabsf(in.at[k].load()));
    }
    for (int mask = 16; mask > 0; mask /= 2) largest = larger(largest, __shfl_xor_sync(0xffffffff, largest, mask));
    float scale = largest / 127;
    if (lane == 0) scales[b] = scale;
    for (int64 i = b * block + lane; i < stop; i += 32 * VECTOR) {
      bool whole = fits && i + VECTOR <= stop;
      Vector<SRC> in = load(source, i, stop, whole);
      Vector<signed char> result;
      for (int k = 0; k < VECTOR; ++k) {
        float code = scale > 0 ? rintf(in.at[k].load() / scale) : 0;
        // fmaxf drops NaN; what the scale makes of such codes is not finite whatever they are
        result.at[k] = (signed char)fminf(fmaxf(code, -127), 127);
      }
      store(codes, i, stop, whole, result);
    }
  }
}

extern "C" __global__ void dequantize_int8(const signed char* codes, const float* scales, int64 numel, int64 block,
                                           DST* destination) {
  bool fits = aligned(codes) && aligned(destination);
  for (int64 i = first_index() * VECTOR; i < numel; i += index_stride() * VECTOR) {
    bool whole = fits && i + VECTOR <= numel;
    Vector<signed char> in = load(codes, i, numel, whole);
    Vector<DST> result;
    for (int k = 0; k < VECTOR; ++k) result.at[k].store(in.at[k] * scales[i / block]);
    store(destination, i, numel, whole, result);
  }
}
