/* Which symbols leave the library. */
#ifndef TESSERA_EXPORT_H
#define TESSERA_EXPORT_H

#if defined(_WIN32)
#if defined(TESSERA_BUILDING)
#define TESSERA_EXPORT __declspec(dllexport)
#else
#define TESSERA_EXPORT __declspec(dllimport)
#endif
#else
#define TESSERA_EXPORT __attribute__((visibility("default")))
#endif

#endif
