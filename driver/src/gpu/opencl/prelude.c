#define KERNEL __kernel
#define FUNCTION
#define GLOBAL __global
#define INDEX get_global_id(0)
#define U8 uchar
#define U16 ushort
#define U32 uint
#define U64 ulong
#define S8 char
#define S16 short
#define S32 int
#define S64 long
#define FLOAT_OF as_float
#define BITS_OF as_uint
#define HALF_TO_FLOAT half_to_float
#define FLOAT_TO_HALF float_to_half
#pragma OPENCL FP_CONTRACT OFF
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define DOUBLE_OF as_double
#define LONG_BITS_OF as_ulong
#endif

float half_to_float(ushort bits) { return vload_half(0, (const __private half *)&bits); }

ushort float_to_half(float value) {
    ushort bits;
    vstore_half_rte(value, 0, (__private half *)&bits);
    return bits;
}
