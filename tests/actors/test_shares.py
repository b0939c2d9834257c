"""Servers and workers as functions, without Ray: together they are one step of one device."""
import numpy as np, jax, jax.numpy as jnp, pytest
from jaxspeed.actors.plan import plan_of
from jaxspeed.actors.share import shares, program_of_share
from jaxspeed.actors.serving import Serving, together
from jaxspeed.actors.working import Working
from jaxspeed.actors.states import put_together, taken_apart
from jaxspeed.config import load_config
from jaxspeed.engine.family import resolve_model
from jaxspeed.train import build_program
import jaxspeed

CFG={
 "run":{"devices":"cpu:4"},
 "model":{"family":"llama","config":{"hidden_size":16,"intermediate_size":32,"num_hidden_layers":2,"num_attention_heads":2,"num_key_value_heads":1,"vocab_size":64,"max_position_embeddings":16}},
 "train_batch_size":8,"gradient_accumulation_steps":2, "gradient_clipping":0.5,
 "optimizer":{"type":"AdamW","params":{"lr":0.01,"weight_decay":0.1}, "exclude_norms_and_biases": True},
 "parallel":{"data_reduction":"parameter_server","servers":2},
}
def test_x():
    config=load_config(CFG); plan=plan_of(config)
    model,loss=resolve_model(config)
    alone=load_config(plan.alone)
    program=build_program(alone,model,loss,devices=jax.devices()[:1])
    dealt=shares(program,2)
    print([ {p:(x.own_shape) for p,x in d.items()} for d in dealt])
    servers=[Serving(program_of_share(program,d,plan.workers)) for d in dealt]
    states=[s.program.init(0) for s in servers]
    worker=Working(program,dealt,plan.workers)
    ref_cfg={**CFG,"parallel":{},"mesh":{"data":2},"run":{}}
    eng=jaxspeed.initialize(config=ref_cfg,devices=jax.devices()[:2])
    rng=np.random.default_rng(0)
    variables=program.init(0).variables
    for step in range(10):
        batch={"tokens":rng.integers(0,64,(8,17)).astype(np.int32),"segment_ids":np.ones((8,17),np.int32)}
        pub=[s.published(st) for s,st in zip(servers,states)]
        src=worker.sources(pub,{})
        out=[worker.gradients(src,variables,{k:v[4*p:4*p+4] for k,v in batch.items()},pub[0].step,p,pub[0].scale) for p in range(2)]
        told,sh=together([o[1] for o in out])
        red=[s.reduce([o[0][i] for o in out],sh) for i,s in enumerate(servers)]
        sq=jnp.stack([r[1] for r in red])
        new=[s.apply(st,r[0],sq,told) for s,st,r in zip(servers,states,red)]
        states=[n[0] for n in new]
        m=eng.train_batch(batch)
        print(float(m["loss"]),float(new[0][1]["loss"]),float(m["grad_norm"]),float(new[1][1]["grad_norm"]))
    whole=put_together(program,[s.given(st) for s,st in zip(servers,states)],dealt,{f"variables/{k}":np.asarray(jax.random.key_data(v)) if jnp.issubdtype(v.dtype,jax.dtypes.prng_key) else np.asarray(v) for k,v in variables.items()})
    for p,x in eng.parameters.items():
        np.testing.assert_allclose(whole.params[p],x,atol=1e-5)
    again,_=taken_apart(program,whole,dealt)
    for a,s,st in zip(again,servers,states):
        g=s.given(st); assert a.keys()==g.keys()
        assert all((a[k]==g[k]).all() for k in g)
