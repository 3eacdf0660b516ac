// Fewer bits for communication: 8 signs a byte, and 8-bit integers with a scale a block of elements.
// -DSRC: storage type of what is quantised; -DDST: of what comes back.

// -- signs, of fp32. error, where there is one, is added to the values first.

__device__ inline float corrected(const float* values, const float* error, int64 i) {
  return error ? values[i] + error[i] : values[i];
}

// sums[b] = sum of |x| over the elements [b * size, (b + 1) * size), one CUDA block each.
extern "C" __global__ void magnitude_sums(const float* values, const float* error, int64 numel, int64 size,
                                          double* sums) {
  for (int64 b = blockIdx.x; b * size < numel; b += gridDim.x) {
    int64 stop = (b + 1) * size < numel ? (b + 1) * size : numel;
    double sum = 0;
    for (int64 i = b * size + threadIdx.x; i < stop; i += THREADS) sum += fabsf(corrected(values, error, i));
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[b] = sum;
  }
}

// Bit i % 8 of byte i / 8 is 1 where x >= 0. A thread makes one byte; error becomes what the signs leave out.
// block: elements that share a scale, a multiple of 8.
extern "C" __global__ void pack_signs(const float* values, float* error, int64 numel, int64 block,
                                      const float* scales, uint8* signs) {
  for (int64 byte = first_index(); byte * 8 < numel; byte += index_stride()) {
    uint32 bits = 0;
    float scale = scales[byte * 8 / block];
    for (int k = 0; k < 8; ++k) {
      int64 i = byte * 8 + k;
      if (i >= numel) break;
      float x = corrected(values, error, i);
      bits |= (uint32)(x >= 0) << k;
      if (error) error[i] = x - (x >= 0 ? scale : -scale);
    }
    signs[byte] = bits;
  }
}

extern "C" __global__ void unpack_signs(const uint8* signs, const float* scales, int64 numel, int64 block,
                                        float* values) {
  for (int64 i = first_index(); i < numel; i += index_stride()) {
    float scale = scales[i / block];
    values[i] = (signs[i / 8] >> (i % 8)) & 1 ? scale : -scale;
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
